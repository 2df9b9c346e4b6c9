// SPDX-License-Identifier: GPL-2.0-only
//
// An entry of the last level is a page or nothing: a split has no use for either.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: .skip_levels = 1,

@@
identifier walker;
@@
 kvm_pgtable_stage2_split(...)
 {
 ...
 struct kvm_pgtable_walker walker = {
 	.cb = stage2_split_walker,
+	.skip_levels = 1,
 };
 ...
 }
