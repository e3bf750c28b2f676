// Dra-driver is the lab's driver of DRA (Kubernetes' dynamic resource allocation) for the VFs of a node. It stands in for two
// public drivers whose modules the Go module proxy does not serve, dra-driver-sriov and dranet: it names and describes
// devices as the one does that --like says. It runs as a service of the node, with the kubelet's own credentials.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

func main() {
	node := flag.String("node", "", "the Node's name")
	like := flag.String("like", "sriov", "the public driver whose names and attributes are used: sriov or dranet")
	kubeconfig := flag.String("kubeconfig", "/etc/kubernetes/kubelet.conf", "credentials for the API server")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "the kubelet's root directory")
	sysfs := flag.String("sysfs", "/sys", "where sysfs is mounted")
	noPods := flag.Bool("no-pods", false, "only publish devices: there is no containerd")
	klog.InitFlags(nil)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, fail := context.WithCancelCause(ctx)
	public, ok := drivers[*like]
	if !ok || *node == "" {
		exit(fmt.Errorf("--node=%q --like=%q: give the Node's name, and sriov or dranet", *node, *like))
	}
	own := filepath.Join(*kubelet, "plugins", public.name)
	claims := claims{driver: public.name, folder: filepath.Join(own, "claims"), sysfs: *sysfs, fail: fail}
	for _, folder := range []string{filepath.Join(*kubelet, "plugins_registry"), claims.folder} {
		if err := os.MkdirAll(folder, 0o750); err != nil {
			exit(err)
		}
	}
	if !*noPods {
		closed, err := moveNetdevs(ctx, claims)
		if err != nil {
			exit(err)
		}
		go func() {
			<-closed
			fail(fmt.Errorf("containerd has closed the connection"))
		}()
	}
	if err := serve(ctx, *node, *kubeconfig, *kubelet, own, public, claims); err != nil {
		exit(err)
	}
}

// serve publishes the node's devices, and prepares claims until the context ends.
func serve(ctx context.Context, node, kubeconfig, kubelet, own string, public public, claims claims) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	// Only once: dra-driver-sriov, too, looks for VFs when it starts.
	devices, err := discover(claims.sysfs, public)
	if err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(ctx, claims,
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(node),
		kubeletplugin.DriverName(public.name),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(kubelet, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(own),
		// Neither public driver says which devices are healthy.
		kubeletplugin.HealthService(false),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: devices}}}
	resources := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}}
	if err := helper.PublishResources(ctx, resources); err != nil {
		return err
	}
	klog.Infof("%s publishes %d devices", public.name, len(devices))
	<-ctx.Done()
	if cause := context.Cause(ctx); cause != context.Canceled {
		return cause
	}
	return nil
}

func exit(err error) {
	klog.Error(err)
	klog.FlushAndExit(klog.ExitFlushTimeout, 1)
}
