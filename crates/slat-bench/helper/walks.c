/*
 * The tree's walks and operations, as they are: `pgtable.c` is the tree's own file.
 *
 * With SLAT_SHARED, each walk of live tables counts as shared with others, so that it changes entries
 * by compare-and-swap. Only tables that are not linked yet are walked without the invalidation of
 * break-before-make.
 */
#include <linux/bitfield.h>
#include <asm/kvm_pgtable.h>
#include <asm/stage2_pgtable.h>

#if SLAT_SHARED
#define kvm_pgtable_walk_shared(ctx) (!((ctx)->flags & KVM_PGTABLE_WALK_SKIP_BBM_TLBI))
#endif

#include "pgtable.c"
