// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_mmu.h
// leaves 1: void kvm_rearm_cache_flush(struct kvm *kvm);

@@
identifier vcpu;
@@
+void kvm_rearm_cache_flush(struct kvm *kvm);
 void kvm_set_way_flush(struct kvm_vcpu *vcpu);
