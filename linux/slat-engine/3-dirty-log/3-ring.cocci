// SPDX-License-Identifier: GPL-2.0-only
//
// file: virt/kvm/dirty_ring.c
// leaves 1: kvm_arch_dirty_log_lock(kvm);
// leaves 1: kvm_arch_dirty_log_unlock(kvm);

@@
@@
 kvm_reset_dirty_gfn(...)
 {
 <...
(
-	KVM_MMU_LOCK(kvm);
+	kvm_arch_dirty_log_lock(kvm);
|
-	KVM_MMU_UNLOCK(kvm);
+	kvm_arch_dirty_log_unlock(kvm);
)
 ...>
 }
