// SPDX-License-Identifier: GPL-2.0-only
//
// file: virt/kvm/kvm_main.c
// leaves 1: shared = kvm_arch_clears_dirty_log_shared(kvm);
// leaves 1: KVM_MMU_LOCK_SHARED(kvm);
// leaves 1: KVM_MMU_UNLOCK_SHARED(kvm);

@@
@@
 kvm_clear_dirty_log_protect(...)
 {
 <...
(
-	bool flush;
+	bool flush, shared;
|
-	KVM_MMU_LOCK(kvm);
+	shared = kvm_arch_clears_dirty_log_shared(kvm);
+	if (shared)
+		KVM_MMU_LOCK_SHARED(kvm);
+	else
+		KVM_MMU_LOCK(kvm);
|
-	KVM_MMU_UNLOCK(kvm);
+	if (shared)
+		KVM_MMU_UNLOCK_SHARED(kvm);
+	else
+		KVM_MMU_UNLOCK(kvm);
)
 ...>
 }
