// Plugin-config says whether k8s-rdma-shared-dev-plugin takes a configuration: by its own parser, and without a field that it does not know.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/Mellanox/k8s-rdma-shared-dev-plugin/pkg/resources"
	"github.com/Mellanox/k8s-rdma-shared-dev-plugin/pkg/types"
)

func main() {
	if len(os.Args) != 2 {
		fail("usage: plugin-config FILE")
	}
	log.SetOutput(io.Discard)
	raw, err := os.ReadFile(os.Args[1])
	if err != nil {
		fail(err.Error())
	}
	strict := json.NewDecoder(bytes.NewReader(raw))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&types.UserConfigList{}); err != nil {
		fail(err.Error())
	}
	manager := resources.NewResourceManager(os.Args[1], false)
	if err := manager.ReadConfig(); err != nil {
		fail(err.Error())
	}
	if err := manager.ValidateConfigs(); err != nil {
		fail(err.Error())
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(1)
}
