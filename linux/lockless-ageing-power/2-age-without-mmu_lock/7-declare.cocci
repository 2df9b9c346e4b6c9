// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/powerpc/include/asm/kvm_book3s.h
// leaves 1: bool lockless);

@@
identifier kvm, memslot, gfn;
@@
 bool kvm_age_radix(struct kvm *kvm, struct kvm_memory_slot *memslot, unsigned long gfn
+	, bool lockless
 );
