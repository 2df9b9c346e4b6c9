// SPDX-License-Identifier: GPL-2.0-only
//
// file: virt/kvm/kvm_main.c
// leaves: = kvm_ages_lockless(kvm),

@@
identifier range, f;
@@
 f(...)
 {
 <...
 const struct kvm_mmu_notifier_range range = {
 	.lockless =
-	IS_ENABLED(CONFIG_KVM_MMU_LOCKLESS_AGING),
+	kvm_ages_lockless(kvm),
 };
 ...>
 }
