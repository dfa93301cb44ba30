//! What each version's file declares its properties and its table with: the members' names, in NCCL's order. What a member is, and where
//! its value comes from, stands here once. That sizes and offsets are C's is checked by tests/library/layout.rs, member by member.

/// Declares a version's properties. `$parts`: devices that one is made of, at most.
macro_rules! properties {
    ($name:ident, $size:literal bytes, $parts:literal parts: $($member:ident)+) => {
        /// Properties of a device; `abi::nccl::declare` says what each member is.
        #[derive(Debug, Clone, Copy)]
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name {
            $(pub $member: property!(type $member, $parts),)+
        }

        const _: () = assert!(size_of::<$name>() == $size);

        impl TryFrom<&$crate::abi::plugin::Description> for $name {
            type Error = $crate::base::error::Error;

            fn try_from(device: &$crate::abi::plugin::Description) -> $crate::base::error::Result<Self> {
                Ok($name { $($member: property!($member of device),)+ })
            }
        }
    };
}

/// The type and the value of a member of a device's properties.
macro_rules! property {
    (type name, $parts:literal) => { *mut std::ffi::c_char };
    (type pciPath, $parts:literal) => { *mut std::ffi::c_char };
    (type guid, $parts:literal) => { u64 };
    (type latency, $parts:literal) => { f32 };
    (type vProps, $parts:literal) => { $crate::abi::nccl::types::VDeviceProps<$parts> };
    (type maxP2pBytes, $parts:literal) => { usize };
    (type maxCollBytes, $parts:literal) => { usize };
    (type railId, $parts:literal) => { i16 };
    (type planeId, $parts:literal) => { i16 };
    (type $other:ident, $parts:literal) => { std::ffi::c_int };
    // Unique; valid as long as the process lives.
    (name of $device:ident) => { $device.name };
    // Path of the PCI device in /sys, or NULL.
    (pciPath of $device:ident) => { $device.pci_path };
    // Unique per NIC, shared by its ports.
    (guid of $device:ident) => { $device.properties.guid };
    // Kinds of memory that can be registered, NCCL_PTR_* as bits.
    (ptrSupport of $device:ident) => { $device.properties.ptr_support };
    // 1 if a registration serves every comm of the device.
    (regIsGlobal of $device:ident) => { $device.properties.reg_is_global.into() };
    // 1 if received data has to be flushed whatever NCCL thinks.
    (forceFlush of $device:ident) => { $device.properties.force_flush.into() };
    // Mbit/s.
    (speed of $device:ident) => { $device.properties.speed_mbps };
    // On the NIC.
    (port of $device:ident) => { $device.properties.port };
    // Microseconds.
    (latency of $device:ident) => { $device.properties.latency_us };
    // Comms at most.
    (maxComms of $device:ident) => { $device.properties.max_comms };
    // Buffers in one receive, at most.
    (maxRecvs of $device:ident) => { $device.properties.max_recvs };
    // Data is handled by the CPU.
    (netDeviceType of $device:ident) => { $crate::abi::nccl::types::NCCL_NET_DEVICE_HOST };
    (netDeviceVersion of $device:ident) => { $crate::abi::nccl::types::NCCL_NET_DEVICE_INVALID_VERSION };
    // The physical devices that it consists of; itself, if it is one.
    (vProps of $device:ident) => { $crate::abi::nccl::types::VDeviceProps::new(&$device.properties.vdevs)? };
    // Bytes in one message, at most; of a collective, at most.
    (maxP2pBytes of $device:ident) => { $device.properties.max_p2p_bytes };
    (maxCollBytes of $device:ident) => { $device.properties.max_coll_bytes };
    // Requests in one call, at most.
    (maxMultiRequestSize of $device:ident) => { 1 };
    // Rail and plane that it is on, or -1.
    (railId of $device:ident) => { $device.properties.rail_id };
    (planeId of $device:ident) => { $device.properties.plane_id };
}

/// Declares a version's table, and the symbol that NCCL looks up. Each member has the type and the function that the file has of its name.
macro_rules! table {
    ($(#[$doc:meta])* $symbol:ident: $table:ident, version $v:literal, $properties:ty, $parts:literal parts: $($member:ident)+) => {
        /// The table: functions of this version's file, or of the one that it has them from.
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $table {
            pub name: *const std::ffi::c_char,
            $(pub $member: function!(type $member, $properties, $parts),)+
        }

        // SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
        unsafe impl Sync for $table {}

        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub static $symbol: $table = $table {
            name: $crate::abi::nccl::types::NAME,
            $($member: function!($member, $v, $properties, $parts),)+
        };
    };
}

/// The type and the value of a function in a table.
macro_rules! function {
    (type init, $p:ty, $parts:literal) => { Init };
    (type devices, $p:ty, $parts:literal) => { Devices };
    (type getProperties, $p:ty, $parts:literal) => { GetProperties<$p> };
    (type listen, $p:ty, $parts:literal) => { Listen };
    (type connect, $p:ty, $parts:literal) => { Connect };
    (type accept, $p:ty, $parts:literal) => { Accept };
    (type regMr, $p:ty, $parts:literal) => { RegMr };
    (type regMrDmaBuf, $p:ty, $parts:literal) => { Option<RegMrDmaBuf> };
    (type deregMr, $p:ty, $parts:literal) => { DeregMr };
    (type isend, $p:ty, $parts:literal) => { Isend };
    (type irecv, $p:ty, $parts:literal) => { Irecv };
    (type iflush, $p:ty, $parts:literal) => { Iflush };
    (type test, $p:ty, $parts:literal) => { Test };
    (type getDeviceMr, $p:ty, $parts:literal) => { Option<GetDeviceMr> };
    (type irecvConsumed, $p:ty, $parts:literal) => { Option<IrecvConsumed> };
    (type makeVDevice, $p:ty, $parts:literal) => { MakeVDevice<$parts> };
    (type finalize, $p:ty, $parts:literal) => { Finalize };
    (type setNetAttr, $p:ty, $parts:literal) => { SetNetAttr };
    (type $close:ident, $p:ty, $parts:literal) => { Close };
    (getProperties, $v:literal, $p:ty, $parts:literal) => { getProperties::<$v, $p> };
    (regMrDmaBuf, $v:literal, $p:ty, $parts:literal) => { Some(regMrDmaBuf::<$v>) };
    // NULL: data is handled by the CPU.
    (getDeviceMr, $v:literal, $p:ty, $parts:literal) => { None };
    (irecvConsumed, $v:literal, $p:ty, $parts:literal) => { None };
    (makeVDevice, $v:literal, $p:ty, $parts:literal) => { makeVDevice::<$v, $parts> };
    ($other:ident, $v:literal, $p:ty, $parts:literal) => { $other::<$v> };
}
