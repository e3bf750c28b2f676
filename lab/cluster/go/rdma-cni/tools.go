//go:build tools

// Package rdmacni names the program that the lab builds, so that go.mod and go.sum cover what it needs.
package rdmacni

import _ "github.com/k8snetworkplumbingwg/rdma-cni/cmd/rdma"
