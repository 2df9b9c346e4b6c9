// SPDX-License-Identifier: GPL-2.0-only
//
// No bug, but windows that bugs are met in: the walk of ageing waits before it reads an entry of
// the last level, and before it changes one.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 2: spins < 400000

@@
identifier data, mm_ops, pteref, level;
expression ret;
@@
 __kvm_pgtable_walk(struct kvm_pgtable_walk_data *data, ..., s8 level)
 {
 <...
+	if (level == KVM_PGTABLE_LAST_LEVEL &&
+	    data->walker->flags == (KVM_PGTABLE_WALK_LEAF | KVM_PGTABLE_WALK_SHARED))
+		for (unsigned int spins = 0; spins < 400000; spins++)
+			barrier();
 ret = __kvm_pgtable_visit(data, mm_ops, pteref, level);
 ...>
 }

@@
identifier data;
@@
 stage2_age_walker(...)
 {
 ...
 data->young = true;
+	for (unsigned int spins = 0; spins < 400000; spins++)
+		barrier();
 ...
 }
