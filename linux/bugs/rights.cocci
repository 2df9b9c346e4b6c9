// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: A split forgets rights.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves: prot = KVM_PGTABLE_PROT_R;

@@

@@
 stage2_split_walker(...)
 {
 <...
 prot = kvm_pgtable_stage2_pte_prot(pte);
+prot = KVM_PGTABLE_PROT_R;
 ...>
 }
