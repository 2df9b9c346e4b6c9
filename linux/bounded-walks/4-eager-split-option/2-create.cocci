// SPDX-License-Identifier: GPL-2.0-only
//
// KVM takes the capability before the first memslot only. The library adds that one itself, so no
// test comes early enough: the library has to set it.
//
// file: tools/testing/selftests/kvm/lib/kvm_util.c
// leaves 1: size_t vm_eager_split_chunk_size;
// leaves 1: vm_enable_cap(vm, KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE,

@@
@@
+size_t vm_eager_split_chunk_size;
+
 struct kvm_vm *____vm_create(...) { ... }

@@
identifier vm;
@@
 ____vm_create(...)
 {
 <...
 vm_open(vm);
+
+	if (vm_eager_split_chunk_size)
+		vm_enable_cap(vm, KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE,
+			      vm_eager_split_chunk_size);
 ...>
 }
