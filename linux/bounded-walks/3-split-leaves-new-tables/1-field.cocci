// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_pgtable.h
// leaves 1: const bool skip_new;

@@
@@
 struct kvm_pgtable_walker {
 	...
+	/**
+	 * @skip_new: Do not enter a table that the visitor callback installed in place of a leaf.
+	 *	      No pre-order or post-order callback runs for such a table. Must not be
+	 *	      combined with KVM_PGTABLE_WALK_TABLE_PRE.
+	 */
+	const bool skip_new;
 };
