//go:build tools

// Package sriov names the CNI plugin that the lab builds, so that go.mod and go.sum cover what it needs.
package sriov

import _ "github.com/k8snetworkplumbingwg/sriov-cni/cmd/sriov"
