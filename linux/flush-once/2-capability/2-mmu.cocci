// SPDX-License-Identifier: GPL-2.0-only
//
// No vCPU may exist yet, so that none sees the policy change, and all see it.
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: int kvm_set_flush_once(struct kvm *kvm, u64 once)

@@
@@
 stage2_flush_once(...) { ... }
+int kvm_set_flush_once(struct kvm *kvm, u64 once)
+{
+	int r = -EINVAL;
+
+	mutex_lock(&kvm->lock);
+	/* KVM never flushes with FEAT_S2FWB. */
+	if (once <= 1 && !kvm->created_vcpus && !cpus_have_final_cap(ARM64_HAS_STAGE2_FWB)) {
+		kvm->arch.flush_once = once;
+		r = 0;
+	}
+	mutex_unlock(&kvm->lock);
+	return r;
+}
