package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// claims are the claims that the kubelet has had prepared: a file each, so that a driver that was restarted knows them.
type claims struct {
	driver, folder, sysfs string
	fail                  context.CancelCauseFunc
}

// prepared is the content of such a file: the pods that use a claim, and the netdevs of its VFs by PCI address.
type prepared struct {
	Pods    []string
	Netdevs map[string]string
}

// PrepareResourceClaims notes which netdevs the claims' pods get when their sandboxes are made.
func (c claims) PrepareResourceClaims(_ context.Context, given []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range given {
		devices, err := c.prepare(claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func (c claims) prepare(claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	// The kubelet may ask again while the pod has the netdevs.
	known, err := c.read(string(claim.UID))
	if err != nil {
		return nil, err
	}
	wanted := prepared{Netdevs: map[string]string{}}
	for _, user := range claim.Status.ReservedFor {
		wanted.Pods = append(wanted.Pods, string(user.UID))
	}
	var devices []kubeletplugin.Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != c.driver {
			continue
		}
		address, err := addressOf(result.Device)
		if err != nil {
			return nil, err
		}
		netdev := known.Netdevs[address]
		if netdev == "" {
			netdev = first(c.sysfs, "bus/pci/devices", address, "net")
		}
		if netdev == "" {
			return nil, fmt.Errorf("%s has no netdev here", address)
		}
		wanted.Netdevs[address] = netdev
		devices = append(devices, kubeletplugin.Device{
			Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device,
		})
	}
	content, err := json.Marshal(wanted)
	if err != nil {
		return nil, err
	}
	file := c.file(string(claim.UID))
	if err := os.WriteFile(file+".new", content, 0o640); err != nil {
		return nil, err
	}
	return devices, os.Rename(file+".new", file)
}

// UnprepareResourceClaims forgets claims. Their netdevs are back already: the kubelet has stopped the sandboxes before.
func (c claims) UnprepareResourceClaims(_ context.Context, given []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range given {
		err := os.Remove(c.file(string(claim.UID)))
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		results[claim.UID] = err
	}
	return results, nil
}

// HandleError ends the driver on an error that no retry resolves; systemd starts it again.
func (c claims) HandleError(_ context.Context, err error, message string) {
	klog.Errorf("%s: %v", message, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		c.fail(fmt.Errorf("%s: %w", message, err))
	}
}

// WatchHealthStatus is never called, since the service is off.
func (c claims) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// netdevs are those of a pod's claims.
func (c claims) netdevs(pod string) ([]string, error) {
	files, err := filepath.Glob(c.file("*"))
	if err != nil {
		return nil, err
	}
	var found []string
	for _, file := range files {
		claim, err := c.read(strings.TrimSuffix(filepath.Base(file), ".json"))
		if err != nil {
			return nil, err
		}
		for _, user := range claim.Pods {
			if user == pod {
				for _, netdev := range claim.Netdevs {
					found = append(found, netdev)
				}
			}
		}
	}
	return found, nil
}

// read is what is known of a claim; nothing if it is not prepared.
func (c claims) read(uid string) (prepared, error) {
	var claim prepared
	content, err := os.ReadFile(c.file(uid))
	if errors.Is(err, os.ErrNotExist) {
		return claim, nil
	}
	if err != nil {
		return claim, err
	}
	return claim, json.Unmarshal(content, &claim)
}

func (c claims) file(uid string) string {
	return filepath.Join(c.folder, uid+".json")
}

// addressOf is the PCI address in a device's name, as 0000-3b-00-2 or pci-0000-3b-00-2.
func addressOf(device string) (string, error) {
	parts := strings.Split(strings.TrimPrefix(device, "pci-"), "-")
	if len(parts) != 4 {
		return "", fmt.Errorf("device %s is not named after a PCI address", device)
	}
	return fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3]), nil
}
