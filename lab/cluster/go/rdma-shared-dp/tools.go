//go:build tools

// Package plugin names the device plugin that the lab builds, so that go.mod and go.sum cover what it needs.
package plugin

import _ "github.com/Mellanox/k8s-rdma-shared-dev-plugin/cmd/k8s-rdma-shared-dp"
