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
+	 * Notifiers of other CPUs may age guest memory until the VM is destroyed,
+	 * without mmu_lock. No vCPU can run until then. pKVM's hypervisor has to
+	 * give the pages back before they are freed, and ages under the lock.
+	 */
+	if (is_protected_kvm_enabled()) {
 	kvm_uninit_stage2_mmu(kvm);
+	}
 }
