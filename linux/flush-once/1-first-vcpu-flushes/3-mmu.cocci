// SPDX-License-Identifier: GPL-2.0-only
//
// The flush and what is remembered of it are one step under the lock. A vCPU that asks while
// another flushes sleeps until that is over: it may rely on it only then.
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: stage2_flush_once(vcpu, vcpu_has_cache_enabled(vcpu));
// leaves 1: stage2_flush_once(vcpu, false);
// leaves 1: void kvm_rearm_cache_flush(struct kvm *kvm)

@@
identifier kvm;
@@
 stage2_flush_vm(struct kvm *kvm) { ... }
+
+static void stage2_flush_once(struct kvm_vcpu *vcpu, bool on)
+{
+	struct kvm *kvm = vcpu->kvm;
+	/* AArch32 guests may depend on every flush. */
+	bool each = !kvm->arch.flush_once || vcpu_el1_is_32bit(vcpu);
+
+	/*
+	 * Only the first vCPU to enable its caches flushes. Disabling them or a
+	 * set/way operation always flushes, and makes the next enable flush again.
+	 */
+	mutex_lock(&kvm->arch.flush_lock);
+	if (each || !on || !kvm->arch.flushed)
+		stage2_flush_vm(kvm);
+	kvm->arch.flushed = on;
+	mutex_unlock(&kvm->arch.flush_lock);
+}

@@
@@
 stage2_flush_once(...) { ... }
+void kvm_rearm_cache_flush(struct kvm *kvm)
+{
+	/* A vCPU was reset and runs with caches off. The next enable must flush. */
+	mutex_lock(&kvm->arch.flush_lock);
+	kvm->arch.flushed = false;
+	mutex_unlock(&kvm->arch.flush_lock);
+}

@@
identifier vcpu;
@@
 kvm_toggle_cache(struct kvm_vcpu *vcpu, ...)
 {
 <...
-	stage2_flush_vm(vcpu->kvm);
+	stage2_flush_once(vcpu, vcpu_has_cache_enabled(vcpu));
 ...>
 }

@@
identifier vcpu;
@@
 kvm_set_way_flush(struct kvm_vcpu *vcpu)
 {
 <...
-	stage2_flush_vm(vcpu->kvm);
+	stage2_flush_once(vcpu, false);
 ...>
 }
