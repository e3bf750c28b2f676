// SPDX-License-Identifier: Dual MIT/GPL
// A module with the name and licence of NVIDIA's open driver, and nothing else of it.
#include <linux/module.h>

MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("stands for NVIDIA's driver in Trackbed's lab");
