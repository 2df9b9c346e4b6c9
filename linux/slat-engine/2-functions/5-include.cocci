// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/mmu.c
// versions: 7.0..
// leaves 1: #include <asm/kvm_slat.h>

@@
@@
 #include <asm/kvm_emulate.h>
+#include <asm/kvm_slat.h>
