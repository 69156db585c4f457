//! The primary context of one GPU, and every driver call as a `Result`.
//!
//! Most calls act on the context that is current on the calling thread. They are methods of
//! [`Entered`], which exists only while ours is, so that no thread can forget to make it so; what
//! was current before is so again afterwards. No state, no locks.
#![expect(unsafe_code, reason = "calls of foreign functions")]

use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use headrace_core::{Error, Result};

use super::driver::{
    CopyAttributes, DevicePtr, Driver, EVENT_DISABLE_TIMING, HOST_PORTABLE_MAPPED, Handle, HostFn,
    NOT_READY, STREAM_NON_BLOCKING, SUCCESS, Status, WAIT_VALUE_GEQ, WRITE_VALUE_DEFAULT,
};

/// A retained primary context: the one that torch uses as well.
pub(super) struct Context {
    driver: Driver,
    ordinal: u32,
    device: i32,
    raw: Handle,
}

impl Context {
    /// Fails with `Config` if there is no such GPU, `Device` if its context cannot be made.
    pub(super) fn retain(driver: Driver, ordinal: u32) -> Result<Arc<Self>> {
        let mut device = 0;
        let mut raw = 0;
        // SAFETY: results are written to locals.
        unsafe {
            driver.check("cuInit", (driver.init)(0))?;
            let index = i32::try_from(ordinal).unwrap_or(i32::MAX);
            let found = (driver.device_get)(&raw mut device, index);
            if found != SUCCESS {
                let expected = format!("the index of a GPU ({})", driver.text(found));
                return Err(Error::config("ordinal", ordinal, expected));
            }
            let retained = (driver.context_retain)(&raw mut raw, device);
            driver.check("cuDevicePrimaryCtxRetain", retained)?;
        }
        Ok(Arc::new(Self {
            driver,
            ordinal,
            device,
            raw,
        }))
    }

    /// Index of the GPU.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Whether the driver has a batch copy.
    pub(super) fn has_batch(&self) -> bool {
        self.driver.memcpy_batch.is_some()
    }

    /// Name of the GPU and version of the driver.
    pub(super) fn identity(&self) -> Result<(String, i32)> {
        let mut version = 0;
        let mut name = [0; 256];
        // SAFETY: results are written to locals; the length is that of the array, and the driver
        // ends the name with a zero.
        let name = unsafe {
            let got = (self.driver.driver_version)(&raw mut version);
            self.driver.check("cuDriverGetVersion", got)?;
            let got = (self.driver.device_name)(name.as_mut_ptr(), 255, self.device);
            self.driver.check("cuDeviceGetName", got)?;
            CStr::from_ptr(name.as_ptr())
        };
        Ok((name.to_string_lossy().into_owned(), version))
    }

    /// Makes the context current on this thread while the result lives.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained until `drop`.
        let pushed = unsafe { (self.driver.context_push)(self.raw) };
        self.driver.check("cuCtxPushCurrent", pushed)?;
        Ok(Entered {
            context: self,
            thread: PhantomData,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained by `retain`. A driver that is shut down refuses, which changes nothing.
        let _ = unsafe { (self.driver.context_release)(self.device) };
    }
}

/// The context is current on this thread.
pub(super) struct Entered<'a> {
    context: &'a Context,
    /// It is so on this thread alone.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = 0;
        // SAFETY: pushed by `enter` on this thread; the result is written to a local.
        let _ = unsafe { (self.context.driver.context_pop)(&raw mut popped) };
    }
}

/// An event, stream or module of the current context passes as an integer: a stale one is refused
/// by the driver or was never handed out. Pointers are those of the caller's regions.
impl Entered<'_> {
    fn driver(&self) -> &Driver {
        &self.context.driver
    }

    fn ok(&self, call: &'static str, status: Status) -> Result<()> {
        self.driver().check(call, status)
    }

    /// `Some(true)`: over; `Some(false)`: not yet.
    fn over(&self, call: &'static str, status: Status) -> Result<bool> {
        if status == NOT_READY {
            return Ok(false);
        }
        self.ok(call, status).map(|()| true)
    }

    pub(super) fn new_stream(&self) -> Result<Handle> {
        let mut stream = 0;
        // SAFETY: the result is written to a local.
        let made = unsafe { (self.driver().stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.ok("cuStreamCreate", made).map(|()| stream)
    }

    pub(super) fn destroy_stream(&self, stream: Handle) {
        // SAFETY: the caller owns the stream. Work on it runs on; a refusal changes nothing.
        let _ = unsafe { (self.driver().stream_destroy)(stream) };
    }

    /// Whether everything on a stream is over.
    pub(super) fn stream_over(&self, stream: Handle) -> Result<bool> {
        // SAFETY: no memory is involved.
        let status = unsafe { (self.driver().stream_query)(stream) };
        self.over("cuStreamQuery", status)
    }

    pub(super) fn synchronize(&self, stream: Handle) -> Result<()> {
        // SAFETY: no memory is involved.
        let status = unsafe { (self.driver().stream_synchronize)(stream) };
        self.ok("cuStreamSynchronize", status)
    }

    pub(super) fn wait_event(&self, stream: Handle, event: Handle) -> Result<()> {
        // SAFETY: no memory is involved.
        let status = unsafe { (self.driver().stream_wait_event)(stream, event, 0) };
        self.ok("cuStreamWaitEvent", status)
    }

    pub(super) fn write_value(&self, stream: Handle, word: DevicePtr, value: u32) -> Result<()> {
        let flags = WRITE_VALUE_DEFAULT;
        // SAFETY: the word is one of the pinned words of the device, which outlive its streams.
        let status = unsafe { (self.driver().stream_write_value)(stream, word, value, flags) };
        self.ok("cuStreamWriteValue32", status)
    }

    pub(super) fn wait_value(&self, stream: Handle, word: DevicePtr, value: u32) -> Result<()> {
        // SAFETY: as for `write_value`.
        let status =
            unsafe { (self.driver().stream_wait_value)(stream, word, value, WAIT_VALUE_GEQ) };
        self.ok("cuStreamWaitValue32", status)
    }

    /// An event that keeps no time.
    pub(super) fn new_event(&self) -> Result<Handle> {
        let mut event = 0;
        // SAFETY: the result is written to a local.
        let made = unsafe { (self.driver().event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.ok("cuEventCreate", made).map(|()| event)
    }

    pub(super) fn destroy_event(&self, event: Handle) {
        // SAFETY: the caller owns the event; the driver frees it once nothing waits for it.
        let _ = unsafe { (self.driver().event_destroy)(event) };
    }

    pub(super) fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: no memory is involved.
        let status = unsafe { (self.driver().event_record)(event, stream) };
        self.ok("cuEventRecord", status)
    }

    /// Whether everything before the last record of an event is over.
    pub(super) fn event_over(&self, event: Handle) -> Result<bool> {
        // SAFETY: no memory is involved.
        let status = unsafe { (self.driver().event_query)(event) };
        self.over("cuEventQuery", status)
    }

    /// Pins `bytes` bytes at a page boundary; their address for the GPU.
    pub(super) fn register(&self, address: u64, bytes: u64) -> Result<DevicePtr> {
        let pointer = host_pointer(address);
        // SAFETY: the caller keeps the memory mapped until `unregister`.
        let pinned = unsafe {
            (self.driver().host_register)(pointer, size_of_host(bytes), HOST_PORTABLE_MAPPED)
        };
        self.ok("cuMemHostRegister", pinned)?;
        let mapped = self.device_pointer(address);
        if mapped.is_err() {
            let _ = self.unregister(address);
        }
        mapped
    }

    /// Unpins what was registered there.
    pub(super) fn unregister(&self, address: u64) -> Result<()> {
        // SAFETY: the caller knows that no copy touches the memory any more.
        let status = unsafe { (self.driver().host_unregister)(host_pointer(address)) };
        self.ok("cuMemHostUnregister", status)
    }

    fn device_pointer(&self, address: u64) -> Result<DevicePtr> {
        let mut mapped = 0;
        // SAFETY: the result is written to a local; the address is only looked up.
        let status = unsafe {
            (self.driver().host_device_pointer)(&raw mut mapped, host_pointer(address), 0)
        };
        self.ok("cuMemHostGetDevicePointer", status)
            .map(|()| mapped)
    }

    /// Pinned memory, and its address for the GPU.
    pub(super) fn new_pinned(&self, bytes: usize) -> Result<(u64, DevicePtr)> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the result is written to a local.
        let made =
            unsafe { (self.driver().host_alloc)(&raw mut pointer, bytes, HOST_PORTABLE_MAPPED) };
        self.ok("cuMemHostAlloc", made)?;
        let address = pointer.expose_provenance() as u64;
        match self.device_pointer(address) {
            Ok(mapped) => Ok((address, mapped)),
            Err(refused) => {
                self.free_pinned(address);
                Err(refused)
            }
        }
    }

    pub(super) fn free_pinned(&self, address: u64) {
        // SAFETY: the caller owns the allocation and knows that no kernel reads it any more.
        let _ = unsafe { (self.driver().host_free)(host_pointer(address)) };
    }

    pub(super) fn new_memory(&self, bytes: usize) -> Result<DevicePtr> {
        let mut pointer = 0;
        // SAFETY: the result is written to a local.
        let made = unsafe { (self.driver().memory_alloc)(&raw mut pointer, bytes) };
        self.ok("cuMemAlloc", made).map(|()| pointer)
    }

    pub(super) fn free_memory(&self, pointer: DevicePtr) {
        // SAFETY: the caller owns the allocation.
        let _ = unsafe { (self.driver().memory_free)(pointer) };
    }

    /// One copy of the copy engine.
    pub(super) fn copy(
        &self,
        stream: Handle,
        to_device: bool,
        host: u64,
        device: DevicePtr,
        bytes: u64,
    ) -> Result<()> {
        let (host, bytes) = (host_pointer(host), size_of_host(bytes));
        if to_device {
            // SAFETY: both ranges lie inside regions whose owners live until the copy is over.
            let status = unsafe { (self.driver().memcpy_to_device)(device, host, bytes, stream) };
            self.ok("cuMemcpyHtoDAsync", status)
        } else {
            // SAFETY: as above.
            let status = unsafe { (self.driver().memcpy_to_host)(host, device, bytes, stream) };
            self.ok("cuMemcpyDtoHAsync", status)
        }
    }

    /// Copies of the copy engine in one call. The driver reads the lists before it returns.
    /// Fails with `Device` also where there is no such call.
    pub(super) fn copy_batch(
        &self,
        stream: Handle,
        to_device: bool,
        host: &mut [DevicePtr],
        device: &mut [DevicePtr],
        sizes: &mut [usize],
    ) -> Result<()> {
        let call = "cuMemcpyBatchAsync";
        let count = sizes.len();
        let (Some(batch), true) = (
            self.driver().memcpy_batch,
            host.len() == count && device.len() == count,
        ) else {
            let text = "missing, or called with lists of unequal length".to_owned();
            return Err(Error::Device { call, text });
        };
        let (targets, sources) = if to_device {
            (device, host)
        } else {
            (host, device)
        };
        let mut attributes = CopyAttributes::new(to_device, self.context.device);
        let mut first = 0;
        // SAFETY: the lists have `count` entries each, the attributes one; the ranges they name lie
        // inside regions whose owners live until the copies are over.
        let status = unsafe {
            batch(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                count,
                &raw mut attributes,
                &raw mut first,
                1,
                stream,
            )
        };
        self.ok(call, status)
    }

    /// Loads machine code and finds a kernel in it: (module, function).
    pub(super) fn load(&self, code: &[u8], symbol: &CStr) -> Result<(Handle, Handle)> {
        let (mut module, mut function) = (0, 0);
        // SAFETY: the code is an ELF image that carries its own length; it is copied.
        let loaded = unsafe { (self.driver().module_load)(&raw mut module, code.as_ptr().cast()) };
        self.ok("cuModuleLoadData", loaded)?;
        // SAFETY: the module was just loaded; the symbol is a C string.
        let found =
            unsafe { (self.driver().module_function)(&raw mut function, module, symbol.as_ptr()) };
        if let Err(refused) = self.ok("cuModuleGetFunction", found) {
            self.unload(module);
            return Err(refused);
        }
        Ok((module, function))
    }

    pub(super) fn unload(&self, module: Handle) {
        // SAFETY: the caller owns the module and knows that no kernel of it runs any more.
        let _ = unsafe { (self.driver().module_unload)(module) };
    }

    /// Launches a kernel with the arguments (address, u32, u32).
    pub(super) fn launch(
        &self,
        function: Handle,
        stream: Handle,
        [blocks, threads]: [u32; 2],
        mut list: DevicePtr,
        [mut first, mut second]: [u32; 2],
    ) -> Result<()> {
        let mut arguments: [*mut c_void; 3] = [
            (&raw mut list).cast(),
            (&raw mut first).cast(),
            (&raw mut second).cast(),
        ];
        // SAFETY: the driver copies the three arguments, whose types are those of the kernel, before
        // it returns; what the list names lives until the kernel is over.
        let status = unsafe {
            (self.driver().launch_kernel)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.ok("cuLaunchKernel", status)
    }

    /// Has a thread of the driver call `function` in the order of a stream.
    pub(super) fn call_host(&self, stream: Handle, function: HostFn, value: usize) -> Result<()> {
        let value = std::ptr::without_provenance_mut(value);
        // SAFETY: the function takes an integer in the shape of a pointer, and any integer will do.
        let status = unsafe { (self.driver().launch_host_function)(stream, function, value) };
        self.ok("cuLaunchHostFunc", status)
    }
}

fn host_pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(size_of_host(address))
}

/// Lengths and addresses of this process fit its own integers.
fn size_of_host(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// A symbol as the driver wants it. Fails with `Config` if it cannot be one.
pub(super) fn symbol(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| Error::config("symbol", name, "a name without a zero byte"))
}
