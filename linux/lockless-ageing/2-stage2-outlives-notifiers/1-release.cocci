// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/nested.c
// leaves 1: if (is_protected_kvm_enabled())

@@
identifier kvm;
@@
 kvm_arch_flush_shadow_all(struct kvm *kvm)
 {
 ...
+	/*
+	 * Other CPUs may be ageing without mmu_lock in an MMU notifier, so keep
+	 * stage 2 until the VM is destroyed. No vCPU can run by now. With pKVM,
+	 * the hypervisor must return the pages now, and ageing takes mmu_lock.
+	 */
+	if (is_protected_kvm_enabled()) {
 	kvm_uninit_stage2_mmu(kvm);
+	}
 }
