// SPDX-License-Identifier: Dual MIT/GPL
// NVIDIA's module for GPU peer memory by name: it holds ib_core, and has a user while its device is open.
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <rdma/ib_verbs.h>

static const struct file_operations operations = { .owner = THIS_MODULE };
static struct miscdevice device = { .minor = MISC_DYNAMIC_MINOR, .name = "gpu-memory", .fops = &operations };

static int add(struct ib_device *ibdev)
{
	return 0;
}

static struct ib_client client = { .name = "nvidia_peermem", .add = add };

static int __init start(void)
{
	int err = ib_register_client(&client);

	if (err)
		return err;
	err = misc_register(&device);
	if (err)
		ib_unregister_client(&client);
	return err;
}

static void __exit end(void)
{
	misc_deregister(&device);
	ib_unregister_client(&client);
}

module_init(start);
module_exit(end);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("stands for nvidia_peermem in Trackbed's lab");
