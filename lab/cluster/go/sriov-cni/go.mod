module trackbed.internal/lab/sriov-cni

go 1.23.0

// Version 2.10.0: its tags have a major version that its module path has not.
require github.com/k8snetworkplumbingwg/sriov-cni v0.0.0-20250716060549-6e57b33abf15

// As its own go.mod says: replacements count only in the module that is built.
replace github.com/vishvananda/netlink => github.com/vishvananda/netlink v1.2.1-beta.2.0.20240806173335-3b7e16c5f836
