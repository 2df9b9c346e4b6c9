// SPDX-License-Identifier: GPL-2.0-only
//
// Ahead of the switches, as spatch does not lay out a case; behind the checks of protected VMs.
//
// file: arch/arm64/kvm/arm.c
// leaves 1: ext == KVM_CAP_ARM_FLUSH_ONCE
// leaves 1: cap->cap == KVM_CAP_ARM_FLUSH_ONCE

@@
identifier kvm, ext, r;
@@
 kvm_vm_ioctl_check_extension(struct kvm *kvm, long ext)
 {
 int r;
 ...
+	if (ext == KVM_CAP_ARM_FLUSH_ONCE) {
+		return !cpus_have_final_cap(ARM64_HAS_STAGE2_FWB);
+	}
+
 switch (ext) { case KVM_CAP_IRQCHIP: ... }
 ...
 }

@@
identifier kvm, cap, r;
@@
 kvm_vm_ioctl_enable_cap(struct kvm *kvm, struct kvm_enable_cap *cap)
 {
 int r = ...;
 ...
+	if (cap->cap == KVM_CAP_ARM_FLUSH_ONCE) {
+		return kvm_set_flush_once(kvm, cap->args[0]);
+	}
+
 switch (cap->cap) { case KVM_CAP_ARM_NISV_TO_USER: ... }
 ...
 }
