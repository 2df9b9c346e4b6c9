// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: .put_table = kvm_s2_put_table,
// leaves 1: static void kvm_s2_put_table(void *addr)

@@
identifier addr;
@@
 kvm_s2_put_page(void *addr) { ... }
+
+static void kvm_s2_put_table_rcu_cb(struct rcu_head *head)
+{
+	kvm_s2_put_page(page_to_virt(container_of(head, struct page, rcu_head)));
+}
+
+static void kvm_s2_put_table(void *addr)
+{
+	call_rcu(&virt_to_page(addr)->rcu_head, kvm_s2_put_table_rcu_cb);
+}

@@
@@
 struct kvm_pgtable_mm_ops kvm_s2_mm_ops = {
 .put_page = kvm_s2_put_page,
+.put_table = kvm_s2_put_table,
 };
