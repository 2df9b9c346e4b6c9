// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/powerpc/kvm/book3s_hv.c
// leaves 1: synchronize_rcu();
// leaves 1: smp_store_release(&kvm->arch.radix, 1);

@@
identifier kvm;
@@
 kvmppc_switch_mmu_to_hpt(struct kvm *kvm)
 {
 ...
+	/* Lockless walks that began before may still be in the tables. */
+	synchronize_rcu();
 kvmppc_free_radix(kvm);
 ...
 }

@@
identifier kvm;
@@
 kvmppc_switch_mmu_to_radix(struct kvm *kvm)
 {
 <...
-	kvm->arch.radix = 1;
+	/* Lockless walks find the tables that were just allocated. */
+	smp_store_release(&kvm->arch.radix, 1);
 ...>
 }
