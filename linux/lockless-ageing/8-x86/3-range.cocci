// SPDX-License-Identifier: GPL-2.0-only
//
// file: include/linux/kvm_host.h
// leaves 1: bool lockless;
// versions: ..6.15

@@
@@
 struct kvm_gfn_range {
 	...
 	bool may_block;
+	bool lockless;
 };
