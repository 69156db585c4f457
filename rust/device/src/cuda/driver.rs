//! The driver's entry points: one table of functions, found in `libcuda` at run time.
//!
//! Nothing links libcuda. Every function is asked of `cuGetProcAddress` by the version whose
//! signature stands here, so that a newer driver gives the same one. Handles are opaque addresses
//! and kept as integers. Signatures are those of `cuda.h` of CUDA 13.0. No state, no locks.
#![expect(unsafe_code, reason = "foreign functions, by address")]

use std::ffi::{CStr, c_char, c_void};
use std::mem::ManuallyDrop;

use headrace_core::{Error, Result};
use libloading::Library;

/// A `CUresult`.
pub(super) type Status = i32;
/// A context, stream, event, module or function.
pub(super) type Handle = usize;
/// A `CUdeviceptr`.
pub(super) type DevicePtr = u64;

pub(super) const SUCCESS: Status = 0;
pub(super) const NOT_READY: Status = 600;

pub(super) const STREAM_NON_BLOCKING: u32 = 1;
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_STREAM_WAIT_VALUE_GEQ`: until `(i32)(word - value) >= 0`, which is cyclic.
pub(super) const WAIT_VALUE_GEQ: u32 = 0;
pub(super) const WRITE_VALUE_DEFAULT: u32 = 0;
/// Portable and mapped, of registrations and of allocations alike.
pub(super) const HOST_PORTABLE_MAPPED: u32 = 0x01 | 0x02;

const LOCATION_DEVICE: i32 = 1;
const LOCATION_HOST: i32 = 2;
const ACCESS_ORDER_STREAM: i32 = 1;

/// What `cuGetProcAddress` is asked for: signatures of CUDA 12.0.
const VERSION: i32 = 12_000;
/// Since CUDA 13.0 the batch copy has no index of the copy that failed.
const BATCH_VERSION: i32 = 13_000;

/// A `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    kind: i32,
    id: i32,
}

/// A `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyAttributes {
    order: i32,
    source: Location,
    target: Location,
    flags: u32,
}

impl CopyAttributes {
    /// Read in stream order, between host memory and the GPU `ordinal`.
    pub(super) fn new(to_device: bool, ordinal: i32) -> Self {
        let host = Location {
            kind: LOCATION_HOST,
            id: 0,
        };
        let device = Location {
            kind: LOCATION_DEVICE,
            id: ordinal,
        };
        let (source, target) = if to_device {
            (host, device)
        } else {
            (device, host)
        };
        Self {
            order: ACCESS_ORDER_STREAM,
            source,
            target,
            flags: 0,
        }
    }
}

/// `cuMemcpyBatchAsync` of CUDA 13.0: targets, sources, sizes, count, attributes, index of the
/// first copy of each attribute, number of attributes, stream.
pub(super) type BatchCopy = unsafe extern "C" fn(
    *mut DevicePtr,
    *mut DevicePtr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    Handle,
) -> Status;

/// A `CUhostFn`.
pub(super) type HostFn = extern "C" fn(*mut c_void);

type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> Status;

macro_rules! driver {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The table. A test fills it with functions of its own.
        #[derive(Clone)]
        pub(super) struct Driver {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Status,)*
            /// Missing before CUDA 13.0; gather copies serve then.
            pub(super) memcpy_batch: Option<BatchCopy>,
        }

        impl Driver {
            /// find: address of a symbol with the signature of a version.
            pub(super) fn resolve(
                find: impl Fn(&'static CStr, i32) -> Option<*mut c_void>,
            ) -> Result<Self> {
                let needed = |symbol: &'static CStr| {
                    find(symbol, VERSION).ok_or_else(|| missing(symbol))
                };
                Ok(Self {
                    // SAFETY: the driver gave the address for this name and version, whose
                    // signature is that of the field.
                    $($field: unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) -> Status,
                        >(needed($symbol)?)
                    },)*
                    // SAFETY: as above.
                    memcpy_batch: find(c"cuMemcpyBatchAsync", BATCH_VERSION).map(|address| unsafe {
                        std::mem::transmute::<*mut c_void, BatchCopy>(address)
                    }),
                })
            }
        }
    };
}

driver! {
    init = c"cuInit": fn(u32);
    driver_version = c"cuDriverGetVersion": fn(*mut i32);
    error_string = c"cuGetErrorString": fn(Status, *mut *const c_char);
    device_get = c"cuDeviceGet": fn(*mut i32, i32);
    device_name = c"cuDeviceGetName": fn(*mut c_char, i32, i32);
    context_retain = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, i32);
    context_release = c"cuDevicePrimaryCtxRelease": fn(i32);
    context_push = c"cuCtxPushCurrent": fn(Handle);
    context_pop = c"cuCtxPopCurrent": fn(*mut Handle);
    stream_create = c"cuStreamCreate": fn(*mut Handle, u32);
    stream_destroy = c"cuStreamDestroy": fn(Handle);
    stream_query = c"cuStreamQuery": fn(Handle);
    stream_synchronize = c"cuStreamSynchronize": fn(Handle);
    stream_wait_event = c"cuStreamWaitEvent": fn(Handle, Handle, u32);
    stream_write_value = c"cuStreamWriteValue32": fn(Handle, DevicePtr, u32, u32);
    stream_wait_value = c"cuStreamWaitValue32": fn(Handle, DevicePtr, u32, u32);
    event_create = c"cuEventCreate": fn(*mut Handle, u32);
    event_destroy = c"cuEventDestroy": fn(Handle);
    event_record = c"cuEventRecord": fn(Handle, Handle);
    event_query = c"cuEventQuery": fn(Handle);
    host_register = c"cuMemHostRegister": fn(*mut c_void, usize, u32);
    host_unregister = c"cuMemHostUnregister": fn(*mut c_void);
    host_device_pointer = c"cuMemHostGetDevicePointer": fn(*mut DevicePtr, *mut c_void, u32);
    host_alloc = c"cuMemHostAlloc": fn(*mut *mut c_void, usize, u32);
    host_free = c"cuMemFreeHost": fn(*mut c_void);
    memory_alloc = c"cuMemAlloc": fn(*mut DevicePtr, usize);
    memory_free = c"cuMemFree": fn(DevicePtr);
    memcpy_to_device = c"cuMemcpyHtoDAsync": fn(DevicePtr, *const c_void, usize, Handle);
    memcpy_to_host = c"cuMemcpyDtoHAsync": fn(*mut c_void, DevicePtr, usize, Handle);
    module_load = c"cuModuleLoadData": fn(*mut Handle, *const c_void);
    module_unload = c"cuModuleUnload": fn(Handle);
    module_function = c"cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    launch_kernel = c"cuLaunchKernel":
        fn(Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void);
    launch_host_function = c"cuLaunchHostFunc": fn(Handle, HostFn, *mut c_void);
}

impl Driver {
    /// Opens `libcuda.so.1`. Fails with `Config` if it is not there or lacks a function.
    pub(super) fn load() -> Result<Self> {
        // SAFETY: the library of the driver; its constructors ask nothing of the caller.
        let library = unsafe { Library::new("libcuda.so.1") };
        let library = library.map_err(|why| {
            let expected = format!("a machine with the NVIDIA driver ({why})");
            Error::config("device", "cuda", expected)
        })?;
        // Never closed: the driver is not made to be unloaded.
        let library = ManuallyDrop::new(library);
        let symbol = c"cuGetProcAddress_v2";
        // SAFETY: the signature is that of the `_v2` symbol, which exists since CUDA 12.0.
        let get = unsafe { library.get::<GetProcAddress>(symbol.to_bytes_with_nul()) };
        let get: GetProcAddress = *get.map_err(|_| missing(symbol))?;
        Self::resolve(|name, version| {
            let mut address = std::ptr::null_mut();
            let mut found = 0;
            // SAFETY: both results are written to locals; the name is a C string.
            let status =
                unsafe { get(name.as_ptr(), &raw mut address, version, 0, &raw mut found) };
            (status == SUCCESS && !address.is_null()).then_some(address)
        })
    }

    /// What a status means, in the driver's words.
    pub(super) fn text(&self, status: Status) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the result is written to a local.
        let known = unsafe { (self.error_string)(status, &raw mut text) } == SUCCESS;
        if !known || text.is_null() {
            return format!("CUDA error {status}");
        }
        // SAFETY: the driver returns a string that lives as long as it is loaded.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} (CUDA error {status})", text.to_string_lossy())
    }

    /// `Ok` for success, else an error that names the call.
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let text = self.text(status);
        Err(Error::Device { call, text })
    }
}

fn missing(symbol: &CStr) -> Error {
    let value = symbol.to_string_lossy();
    Error::config(
        "driver",
        format_args!("without {value}"),
        "a driver for CUDA 12 or newer",
    )
}
