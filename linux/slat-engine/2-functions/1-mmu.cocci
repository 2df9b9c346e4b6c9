// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/mmu.c
// versions: ..6.14
// leaves 1: #include <asm/kvm_slat.h>
// leaves 2: slat_kvm_pgtable_stage2_map(
// leaves 1: slat_kvm_pgtable_stage2_unmap,
// leaves 1: slat_kvm_pgtable_stage2_wrprotect)
// leaves 1: slat_kvm_pgtable_stage2_mkyoung(
// leaves 2: slat_kvm_pgtable_stage2_test_clear_young(
// leaves 1: slat_kvm_pgtable_stage2_relax_perms(
// leaves 1: slat_kvm_pgtable_stage2_flush)
// leaves 1: slat_kvm_pgtable_stage2_split(
// leaves 1: slat_kvm_pgtable_stage2_destroy(

@@
@@
 #include <asm/kvm_emulate.h>
+#include <asm/kvm_slat.h>

@@
@@
-kvm_pgtable_stage2_map
+slat_kvm_pgtable_stage2_map

@@
@@
-kvm_pgtable_stage2_unmap
+slat_kvm_pgtable_stage2_unmap

@@
@@
-kvm_pgtable_stage2_wrprotect
+slat_kvm_pgtable_stage2_wrprotect

@@
@@
-kvm_pgtable_stage2_mkyoung
+slat_kvm_pgtable_stage2_mkyoung

@@
@@
-kvm_pgtable_stage2_test_clear_young
+slat_kvm_pgtable_stage2_test_clear_young

@@
@@
-kvm_pgtable_stage2_relax_perms
+slat_kvm_pgtable_stage2_relax_perms

@@
@@
-kvm_pgtable_stage2_flush
+slat_kvm_pgtable_stage2_flush

@@
@@
-kvm_pgtable_stage2_split
+slat_kvm_pgtable_stage2_split

@@
@@
-kvm_pgtable_stage2_destroy
+slat_kvm_pgtable_stage2_destroy
