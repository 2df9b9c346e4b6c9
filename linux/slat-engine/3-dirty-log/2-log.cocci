// SPDX-License-Identifier: GPL-2.0-only
//
// file: virt/kvm/kvm_main.c
// leaves 2: kvm_arch_dirty_log_lock(kvm);
// leaves 2: kvm_arch_dirty_log_unlock(kvm);

@@
identifier f = { kvm_get_dirty_log_protect, kvm_clear_dirty_log_protect };
@@
 f(...)
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
