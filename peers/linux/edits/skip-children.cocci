// SPDX-License-Identifier: GPL-2.0-only
//
// A walk whose visitor put a table in place of a leaf does not go down into it. A split is one, as long
// as its cache has pages enough to build a table down to the last level: 512 for a block of level 1
// and one above them. With fewer it builds one level, and relies on going down.
//
// leaves: #define KVM_PGTABLE_WALK_SKIP_CHILDREN
// leaves: if (reload && (ctx.flags & KVM_PGTABLE_WALK_SKIP_CHILDREN))
// leaves: (mc->nobjs > PTRS_PER_PTE ? KVM_PGTABLE_WALK_SKIP_CHILDREN : 0)

@@
@@
 #include <asm/stage2_pgtable.h>
+#define KVM_PGTABLE_WALK_SKIP_CHILDREN BIT(17)

@@
identifier level, reload;
type T;
@@
 __kvm_pgtable_visit(..., T level)
 {
 ...
 if (reload) { ... }
+if (reload && (ctx.flags & KVM_PGTABLE_WALK_SKIP_CHILDREN)) table = false;
 ...
 }

@@
identifier mc;
@@
 kvm_pgtable_stage2_split(..., struct kvm_mmu_memory_cache *mc)
 {
 <...
-KVM_PGTABLE_WALK_LEAF
+KVM_PGTABLE_WALK_LEAF | (mc->nobjs > PTRS_PER_PTE ? KVM_PGTABLE_WALK_SKIP_CHILDREN : 0)
 ...>
 }
