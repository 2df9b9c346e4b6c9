// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/riscv/include/asm/kvm_host.h
// versions: ..6.15
// leaves 1: struct kvm_slat slat;
// leaves 1: #include <asm/kvm_slat.h>

@@
@@
 #include <asm/kvm_aia.h>
+#include <asm/kvm_slat.h>

@@
@@
 struct kvm_arch {
 	...
 	phys_addr_t pgd_phys;
+
+	/* The same on Slat's engine */
+	struct kvm_slat slat;
 	...
 };
