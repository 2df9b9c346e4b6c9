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
+	 * @skip_levels: Number of lowest levels that the walk does not enter. Tables at these
+	 *		 levels are neither read nor visited. The table entries that point to
+	 *		 them belong to the level above and are visited as usual.
+	 */
+	const s8 skip_levels;
 };
