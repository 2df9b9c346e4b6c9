// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_host.h
// leaves 1: bool slat_read_lock;

@@
@@
 struct kvm_arch {
 	struct kvm_s2_mmu mmu;
+
+	/* Dirty logs take mmu_lock for reading. Constant for a VM. */
+	bool slat_read_lock;
 	...
 };
