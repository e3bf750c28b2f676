// SPDX-License-Identifier: GPL-2.0
/*
 * Adds Data Center Bridging to a netdev whose driver has none, so that the kernel's half (dcbnl) can be run. This module keeps the
 * priorities with PFC; the kernel's table (net/dcb/dcbnl.c) has the entries for DSCPs. Priority 7 is refused.
 */
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>
#include <net/dcbnl.h>

static char *netdev;
module_param(netdev, charp, 0444);
MODULE_PARM_DESC(netdev, "name of the netdev that is given DCB");

static struct net_device *dev;
static struct ieee_pfc state = { .pfc_cap = 8, .delay = 7 };

static int get_pfc(struct net_device *d, struct ieee_pfc *pfc)
{
	*pfc = state;
	return 0;
}

static int set_pfc(struct net_device *d, struct ieee_pfc *pfc)
{
	if (pfc->pfc_en & 0x80)
		return -EOPNOTSUPP;
	state.pfc_en = pfc->pfc_en;
	state.mbc = pfc->mbc;
	state.delay = pfc->delay;
	return 0;
}

static int set_app(struct net_device *d, struct dcb_app *app)
{
	if (app->selector != IEEE_8021QAZ_APP_SEL_DSCP || app->protocol >= 64)
		return -EINVAL;
	return dcb_ieee_setapp(d, app);
}

static u8 get_dcbx(struct net_device *d)
{
	return DCB_CAP_DCBX_HOST | DCB_CAP_DCBX_VER_IEEE;
}

static const struct dcbnl_rtnl_ops ops = {
	.ieee_getpfc = get_pfc,
	.ieee_setpfc = set_pfc,
	.ieee_setapp = set_app,
	.ieee_delapp = dcb_ieee_delapp,
	.getdcbx = get_dcbx,
};

static int __init dcbsim_init(void)
{
	int err = 0;

	dev = dev_get_by_name(&init_net, netdev ?: "");
	if (!dev)
		return -ENODEV;
	rtnl_lock();
	if (dev->dcbnl_ops)
		err = -EBUSY;
	else
		dev->dcbnl_ops = &ops;
	rtnl_unlock();
	if (err)
		dev_put(dev);
	return err;
}

static void __exit dcbsim_exit(void)
{
	rtnl_lock();
	dev->dcbnl_ops = NULL;
	rtnl_unlock();
	dev_put(dev);
}

module_init(dcbsim_init);
module_exit(dcbsim_exit);
MODULE_LICENSE("GPL");
