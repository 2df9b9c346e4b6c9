// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/include/asm/kvm_pgtable.h
// leaves 1: const bool skip_new;

@@
@@
 struct kvm_pgtable_walker {
 	...
+	/**
+	 * @skip_new: Do not enter a table that the callback put in place of a leaf. Such a table
+	 *	      is not visited at all, neither before nor after its children. Not together
+	 *	      with KVM_PGTABLE_WALK_TABLE_PRE.
+	 */
+	const bool skip_new;
 };
