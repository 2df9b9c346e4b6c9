// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: a table that unmapping empties is freed while walks may be in it.
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: kvm_s2_put_page(addr);

@@
@@
-static void kvm_s2_put_table_rcu_cb(struct rcu_head *head)
-{
-	...
-}

@@
identifier addr;
@@
 kvm_s2_put_table(void *addr)
 {
-	...
+	kvm_s2_put_page(addr);
 }
