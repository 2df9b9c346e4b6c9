// SPDX-License-Identifier: GPL-2.0-only
//
// What is returned stands where it stood: it may be a macro's.
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: trace_kvm_stage2_age(range->start, range->end, true, young);
// leaves 1: trace_kvm_stage2_age(range->start, range->end, false, young);

@@
identifier kvm, range;
expression e != false;
@@
 kvm_age_gfn(struct kvm *kvm, struct kvm_gfn_range *range)
 {
+	bool young;
 ...
-	return
+	young =
 	e;
+	trace_kvm_stage2_age(range->start, range->end, true, young);
+	return young;
 }

@@
identifier kvm, range;
expression e != false;
@@
 kvm_test_age_gfn(struct kvm *kvm, struct kvm_gfn_range *range)
 {
+	bool young;
 ...
-	return
+	young =
 	e;
+	trace_kvm_stage2_age(range->start, range->end, false, young);
+	return young;
 }
