//go:build tools

// Package plugin names the device plugin that the lab builds, so that go.mod and go.sum cover what it needs.
package plugin

import _ "github.com/k8snetworkplumbingwg/sriov-network-device-plugin/cmd/sriovdp"
