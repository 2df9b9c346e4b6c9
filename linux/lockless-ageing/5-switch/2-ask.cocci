// SPDX-License-Identifier: GPL-2.0-only
//
// file: virt/kvm/kvm_main.c
// leaves 1: return lockless_aging && IS_ENABLED(

@@
expression e;
@@
 kvm_ages_lockless(...)
 {
-	return
+	return lockless_aging &&
 	e;
 }
