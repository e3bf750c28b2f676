package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"k8s.io/klog/v2"
)

// mover is a plugin of NRI, containerd's interface for such: it is asked when a pod's sandbox is made and when it has stopped.
type mover struct {
	claims claims
}

// moveNetdevs connects to containerd. The channel is closed when the connection is.
func moveNetdevs(ctx context.Context, claims claims) (<-chan struct{}, error) {
	closed := make(chan struct{})
	// Without a function of ours for this, the library ends the program silently.
	made, err := stub.New(mover{claims}, stub.WithPluginName("dra-driver"), stub.WithPluginIdx("10"),
		stub.WithOnClose(func() { close(closed) }))
	if err != nil {
		return nil, err
	}
	return closed, made.Start(ctx)
}

// RunPodSandbox moves the netdevs of a pod's claims into its network namespace, and sets them up there.
func (m mover) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return m.each(pod, func(netdev string, host, inside *netlink.Handle, _, there netns.NsHandle) error {
		if _, err := inside.LinkByName(netdev); err == nil {
			return nil
		}
		link, err := host.LinkByName(netdev)
		if err != nil {
			return err
		}
		if err := host.LinkSetNsFd(link, int(there)); err != nil {
			return err
		}
		if link, err = inside.LinkByName(netdev); err != nil {
			return err
		}
		return inside.LinkSetUp(link)
	})
}

// StopPodSandbox moves them back. The kernel would do that, too, but only after the kubelet has given the VFs back.
func (m mover) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return m.each(pod, func(netdev string, _, inside *netlink.Handle, here, _ netns.NsHandle) error {
		link, err := inside.LinkByName(netdev)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil
		}
		if err != nil {
			return err
		}
		return inside.LinkSetNsFd(link, int(here))
	})
}

func (m mover) each(pod *api.PodSandbox, move func(string, *netlink.Handle, *netlink.Handle, netns.NsHandle, netns.NsHandle) error) error {
	netdevs, err := m.claims.netdevs(pod.GetUid())
	path := namespaceOf(pod)
	if err != nil || len(netdevs) == 0 || path == "" {
		return err
	}
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer here.Close()
	there, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer there.Close()
	host, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	defer host.Close()
	inside, err := netlink.NewHandleAt(there)
	if err != nil {
		return err
	}
	defer inside.Close()
	for _, netdev := range netdevs {
		if err := move(netdev, host, inside, here, there); err != nil {
			return fmt.Errorf("pod %s/%s: %s: %w", pod.GetNamespace(), pod.GetName(), netdev, err)
		}
		klog.Infof("pod %s/%s: moved %s", pod.GetNamespace(), pod.GetName(), netdev)
	}
	return nil
}

func namespaceOf(pod *api.PodSandbox) string {
	for _, each := range pod.GetLinux().GetNamespaces() {
		if each.GetType() == "network" {
			return each.GetPath()
		}
	}
	return ""
}
