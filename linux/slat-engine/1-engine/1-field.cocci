// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_pgtable.h
// leaves 1: void *slat;

@@
@@
 struct kvm_pgtable {
 ...
 struct kvm_s2_mmu *mmu;
+
+	/* The tables on Slat's engine, or NULL. */
+	void *slat;
 ...
 };
