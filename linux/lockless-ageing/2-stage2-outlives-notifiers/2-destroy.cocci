// SPDX-License-Identifier: GPL-2.0-only
//
// Later trees do so already.
//
// file: arch/arm64/kvm/arm.c
// leaves 1: /* The MMU notifier is unregistered. */
// versions: ..7.0

@@
identifier kvm;
@@
 kvm_arch_destroy_vm(struct kvm *kvm)
 {
 ...
+	/* The MMU notifier is unregistered. */
+	kvm_uninit_stage2_mmu(kvm);
 	kvm_destroy_mpidr_data(kvm);
 ...
 }
