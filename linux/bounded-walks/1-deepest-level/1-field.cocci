// SPDX-License-Identifier: GPL-2.0-only
//
// The walk counts its levels from the bottom: zero, which every initialiser there is has, is all of
// them.
//
// file: arch/arm64/include/asm/kvm_pgtable.h
// leaves 1: const s8 skip_levels;

@@
@@
 struct kvm_pgtable_walker {
 	...
+	/**
+	 * @skip_levels: How many levels, from the last one up, the walk does not enter. A table of
+	 *		 such a level is neither read nor visited. The entry that points to it is an
+	 *		 entry of the level above, and is visited like any other.
+	 */
+	const s8 skip_levels;
 };
