// SPDX-License-Identifier: GPL-2.0-only
//
// A walk that need not see entries of level 3, the last, does not go down to them. A split is one:
// an entry of level 3 that is met means that its parent has been split already.
//
// leaves: #define KVM_PGTABLE_WALK_SKIP_LEVEL3
// leaves: level == 2 && (ctx.flags & KVM_PGTABLE_WALK_SKIP_LEVEL3)
// leaves: KVM_PGTABLE_WALK_LEAF | KVM_PGTABLE_WALK_SKIP_LEVEL3

@@
@@
 #include <asm/stage2_pgtable.h>
+#define KVM_PGTABLE_WALK_SKIP_LEVEL3 BIT(16)

@@
identifier level, reload;
type T;
@@
 __kvm_pgtable_visit(..., T level)
 {
 ...
 if (reload) { ... }
+if (level == 2 && (ctx.flags & KVM_PGTABLE_WALK_SKIP_LEVEL3)) table = false;
 ...
 }

@@
@@
 kvm_pgtable_stage2_split(...)
 {
 <...
-KVM_PGTABLE_WALK_LEAF
+KVM_PGTABLE_WALK_LEAF | KVM_PGTABLE_WALK_SKIP_LEVEL3
 ...>
 }
