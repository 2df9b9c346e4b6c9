// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_mmu.h
// leaves 1: int kvm_set_flush_once(struct kvm *kvm, u64 once);

@@
identifier vcpu;
@@
+int kvm_set_flush_once(struct kvm *kvm, u64 once);
 void kvm_set_way_flush(struct kvm_vcpu *vcpu);
