//go:build tools

// Package controller names the controller that the lab builds, so that go.mod and go.sum cover what it needs.
package controller

import _ "sigs.k8s.io/node-readiness-controller/cmd"
