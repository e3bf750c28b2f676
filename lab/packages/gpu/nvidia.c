// SPDX-License-Identifier: Dual MIT/GPL
// NVIDIA's open driver by name and licence, and nothing else of it.
#include <linux/module.h>

MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("stands for NVIDIA's driver in Trackbed's lab");
