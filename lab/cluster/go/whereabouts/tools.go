//go:build tools

// Package whereabouts names the programs that the lab builds, so that go.mod and go.sum cover what they need.
package whereabouts

import (
	_ "github.com/k8snetworkplumbingwg/whereabouts/cmd"
	_ "github.com/k8snetworkplumbingwg/whereabouts/cmd/controlloop"
	_ "github.com/k8snetworkplumbingwg/whereabouts/cmd/reconciler"
)
