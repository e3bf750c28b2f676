package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

// public is a public driver: its name, and how it publishes a function. The result is nil for one that it does not publish.
type public struct {
	name     string
	describe func(function) *resourceapi.Device
}

// Read in k8snetworkplumbingwg/dra-driver-sriov cd9404f (pkg/devicestate/discovery.go, pkg/consts) and kubernetes-sigs/dranet
// f258477 (pkg/inventory/db.go, pkg/names).
var drivers = map[string]public{
	"sriov":  {"sriovnetwork.k8snetworkplumbingwg.io", likeSriov},
	"dranet": {"dra.net", likeDranet},
}

// function is a PCI function with a network driver's class, and what sysfs says of it. index: that of a VF; -1: a PF.
type function struct {
	address, vendor, device, netdev, mac, linkType, root string
	numaNode, mtu, vfs                                   int
	rdma                                                 string
	index                                                int
	pf                                                   *function
}

// discover reads all PFs with a netdev, and their VFs.
func discover(sysfs string, public public) ([]resourceapi.Device, error) {
	pci := filepath.Join(sysfs, "bus/pci/devices")
	entries, err := os.ReadDir(pci)
	if err != nil {
		return nil, err
	}
	var found []resourceapi.Device
	add := func(each function) {
		if device := public.describe(each); device != nil {
			found = append(found, *device)
		}
	}
	for _, entry := range entries {
		folder := filepath.Join(pci, entry.Name())
		_, isVF := os.Lstat(filepath.Join(folder, "physfn"))
		if !strings.HasPrefix(text(folder, "class"), "0x02") || isVF == nil || first(folder, "net") == "" {
			continue
		}
		pf := read(sysfs, entry.Name(), -1)
		links, err := filepath.Glob(filepath.Join(folder, "virtfn*"))
		if err != nil {
			return nil, err
		}
		pf.vfs = len(links)
		add(pf)
		for _, link := range links {
			target, err := os.Readlink(link)
			if err != nil {
				return nil, err
			}
			index, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(link), "virtfn"))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", link, err)
			}
			vf := read(sysfs, filepath.Base(target), index)
			vf.pf = &pf
			add(vf)
		}
	}
	slices.SortFunc(found, func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) })
	return found, nil
}

func read(sysfs, address string, index int) function {
	folder := filepath.Join(sysfs, "bus/pci/devices", address)
	netdev := first(folder, "net")
	made := function{
		address: address, index: index, netdev: netdev, rdma: first(folder, "infiniband"),
		vendor: strings.TrimPrefix(text(folder, "vendor"), "0x"), device: strings.TrimPrefix(text(folder, "device"), "0x"),
		mac: text(folder, "net", netdev, "address"), numaNode: number(text(folder, "numa_node"), -1),
		mtu: number(text(folder, "net", netdev, "mtu"), 0), linkType: "unknown",
	}
	switch text(folder, "net", netdev, "type") {
	case "1":
		made.linkType = "ethernet"
	case "32":
		made.linkType = "infiniband"
	}
	if root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(address, deviceattribute.WithFSFromRoot(sysfs)); err == nil {
		made.root = *root.Value.StringValue
	}
	return made
}

// likeSriov describes a VF as dra-driver-sriov does: most values are those of its PF.
func likeSriov(vf function) *resourceapi.Device {
	if vf.pf == nil {
		return nil
	}
	const own = "sriovnetwork.k8snetworkplumbingwg.io/"
	return &resourceapi.Device{Name: dashed(vf.address), Attributes: attributes(map[string]any{
		own + "vendor":                    vf.pf.vendor,
		own + "deviceID":                  vf.device,
		own + "pfDeviceID":                vf.pf.device,
		own + "pciAddress":                vf.address,
		own + "PFName":                    vf.pf.netdev,
		own + "EswitchMode":               "legacy",
		own + "vfID":                      vf.index,
		own + "pfPciAddress":              vf.pf.address,
		own + "linkType":                  vf.pf.linkType,
		own + "rdmaCapable":               vf.rdma != "",
		"k8s.cni.cncf.io/deviceID":        vf.address,
		"dra.net/numaNode":                vf.pf.numaNode,
		"resource.kubernetes.io/pcieRoot": vf.pf.root,
		"resource.kubernetes.io/pciBusID": vf.address,
	})}
}

// likeDranet describes a PF or VF as dranet does. It lacks the names of vendor and model, which dranet looks up in pci.ids.
func likeDranet(each function) *resourceapi.Device {
	const own = "dra.net/"
	described := map[string]any{
		own + "pciAddress": each.address, own + "type": "device", own + "virtual": false, own + "ebpf": false,
		own + "sriov": each.pf == nil && each.vfs > 0, own + "rdma": each.rdma != "", own + "numaNode": each.numaNode,
		"resource.kubernetes.io/pcieRoot": each.root,
	}
	if each.netdev != "" {
		described[own+"ifName"], described[own+"mac"] = each.netdev, each.mac
		described[own+"mtu"], described[own+"encapsulation"] = each.mtu, "ether"
	}
	if each.numaNode >= 0 {
		described["resource.kubernetes.io/numaNode"] = each.numaNode
	}
	if each.rdma != "" {
		described[own+"rdmaDevice"] = each.rdma
	}
	if each.pf != nil {
		described[own+"isSriovVf"] = true
	} else if each.vfs > 0 {
		described[own+"sriovVfs"] = each.vfs
	}
	return &resourceapi.Device{Name: "pci-" + dashed(each.address), Attributes: attributes(described)}
}

func attributes(values map[string]any) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	made := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for name, value := range values {
		var attribute resourceapi.DeviceAttribute
		switch value := value.(type) {
		case string:
			attribute.StringValue = &value
		case bool:
			attribute.BoolValue = &value
		case int:
			wide := int64(value)
			attribute.IntValue = &wide
		}
		made[resourceapi.QualifiedName(name)] = attribute
	}
	return made
}

func dashed(address string) string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(address)
}

// first is the name of the first entry of a folder; empty if there is none.
func first(parts ...string) string {
	entries, err := os.ReadDir(filepath.Join(parts...))
	if err != nil || len(entries) == 0 {
		return ""
	}
	return entries[0].Name()
}

// text is the content of a file of sysfs; empty if it cannot be read.
func text(parts ...string) string {
	content, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

func number(text string, otherwise int) int {
	if value, err := strconv.Atoi(text); err == nil {
		return value
	}
	return otherwise
}
