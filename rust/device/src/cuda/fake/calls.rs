//! What the driver is asked for by name, each on the fake of the current context.

use super::*;

/// Runs `f` on the fake of the current context, unless a failure is due.
fn with(call: &'static str, f: impl FnOnce(&mut State) -> Status) -> Status {
    let context = CURRENT.with_borrow(|stack| stack.last().copied());
    let Some(fake) = context.and_then(fake_of) else {
        return INVALID_CONTEXT;
    };
    let mut state = fake.state.lock();
    match state.failing(call) {
        Some(status) => status,
        None => f(&mut state),
    }
}

pub(super) fn table() -> Driver {
    Driver {
        init,
        driver_version,
        error_string,
        device_get,
        device_name,
        context_retain,
        context_release,
        context_push,
        context_pop,
        stream_create,
        stream_destroy,
        stream_query,
        stream_synchronize,
        stream_wait_event,
        stream_write_value,
        stream_wait_value,
        event_create,
        event_destroy,
        event_record,
        event_query,
        host_register,
        host_unregister,
        host_device_pointer,
        host_alloc,
        host_free,
        memory_alloc,
        memory_free,
        memcpy_to_device,
        memcpy_to_host,
        module_load,
        module_unload,
        module_function,
        launch_kernel,
        launch_host_function,
        memcpy_batch: None,
    }
}

unsafe extern "C" fn init(_: u32) -> Status {
    SUCCESS
}

unsafe extern "C" fn driver_version(version: *mut i32) -> Status {
    unsafe { version.write(13_000) };
    SUCCESS
}

unsafe extern "C" fn error_string(status: Status, text: *mut *const c_char) -> Status {
    let name = match status {
        INVALID_VALUE => c"invalid argument",
        INVALID_CONTEXT => c"invalid device context",
        700 => c"an illegal memory access was encountered",
        _ => return INVALID_VALUE,
    };
    unsafe { text.write(name.as_ptr()) };
    SUCCESS
}

unsafe extern "C" fn device_get(device: *mut i32, ordinal: i32) -> Status {
    let known = usize::try_from(ordinal).is_ok_and(|o| o < FAKES.lock().len());
    unsafe { device.write(ordinal) };
    if known { SUCCESS } else { 101 }
}

unsafe extern "C" fn device_name(name: *mut c_char, _: i32, _: i32) -> Status {
    let text = c"Fake GPU/1";
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name, text.count_bytes() + 1) };
    SUCCESS
}

unsafe extern "C" fn context_retain(context: *mut Handle, device: i32) -> Status {
    unsafe { context.write(Handle::try_from(device).unwrap() + 1) };
    SUCCESS
}

unsafe extern "C" fn context_release(device: i32) -> Status {
    let fake = fake_of(Handle::try_from(device).unwrap() + 1).unwrap();
    fake.state.lock().calls.push(Call::ContextRelease);
    SUCCESS
}

unsafe extern "C" fn context_push(context: Handle) -> Status {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
    SUCCESS
}

unsafe extern "C" fn context_pop(context: *mut Handle) -> Status {
    match CURRENT.with_borrow_mut(Vec::pop) {
        Some(popped) => {
            unsafe { context.write(popped) };
            SUCCESS
        }
        None => INVALID_CONTEXT,
    }
}

unsafe extern "C" fn stream_create(stream: *mut Handle, flags: u32) -> Status {
    with("stream_create", |state| {
        assert_eq!(flags, 1, "streams do not wait for the default stream");
        let handle = state.handle();
        state.streams.insert(handle, VecDeque::new());
        state.calls.push(Call::StreamCreate(handle));
        unsafe { stream.write(handle) };
        SUCCESS
    })
}

unsafe extern "C" fn stream_destroy(stream: Handle) -> Status {
    with("stream_destroy", |state| {
        let queue = state.streams.remove(&stream).expect("a stream");
        assert!(queue.is_empty(), "destroyed with work on it");
        state.calls.push(Call::StreamDestroy(stream));
        SUCCESS
    })
}

unsafe extern "C" fn stream_query(stream: Handle) -> Status {
    with("stream_query", |state| {
        let idle = state.streams.get(&stream).is_none_or(VecDeque::is_empty);
        if idle { SUCCESS } else { NOT_READY }
    })
}

unsafe extern "C" fn stream_synchronize(stream: Handle) -> Status {
    with("stream_synchronize", |state| {
        state.run();
        assert!(state.streams[&stream].is_empty(), "waits for ever");
        SUCCESS
    })
}

unsafe extern "C" fn stream_wait_event(stream: Handle, event: Handle, _: u32) -> Status {
    with("stream_wait_event", |state| {
        let recorded = state.events[&event].0;
        state.push(stream, Call::Wait(stream, event), Op::Wait(event, recorded))
    })
}

unsafe extern "C" fn stream_write_value(s: Handle, at: u64, value: u32, _: u32) -> Status {
    with("stream_write_value", |state| {
        let op = Op::WriteValue(at, value);
        state.push(s, Call::WriteValue(s, at, value), op)
    })
}

unsafe extern "C" fn stream_wait_value(s: Handle, at: u64, value: u32, flags: u32) -> Status {
    with("stream_wait_value", |state| {
        assert_eq!(flags, 0, "greater or equal, cyclic");
        let op = Op::WaitValue(at, value);
        state.push(s, Call::WaitValue(s, at, value), op)
    })
}

unsafe extern "C" fn event_create(event: *mut Handle, flags: u32) -> Status {
    with("event_create", |state| {
        assert_eq!(flags, 2, "events keep no time");
        let handle = state.handle();
        state.events.insert(handle, (0, 0));
        unsafe { event.write(handle) };
        SUCCESS
    })
}

unsafe extern "C" fn event_destroy(event: Handle) -> Status {
    with("event_destroy", |state| {
        state.events.remove(&event).expect("an event");
        state.calls.push(Call::EventDestroy(event));
        SUCCESS
    })
}

unsafe extern "C" fn event_record(event: Handle, stream: Handle) -> Status {
    with("event_record", |state| {
        let e = state.events.get_mut(&event).unwrap();
        e.0 += 1;
        let op = Op::Record(event, e.0);
        state.push(stream, Call::Record(event, stream), op)
    })
}

unsafe extern "C" fn event_query(event: Handle) -> Status {
    with("event_query", |state| {
        let (enqueued, run) = state.events[&event];
        if run >= enqueued { SUCCESS } else { NOT_READY }
    })
}

unsafe extern "C" fn host_register(at: *mut c_void, bytes: usize, flags: u32) -> Status {
    with("host_register", |state| {
        assert_eq!(
            (at.addr() % 4096, bytes % 4096, flags),
            (0, 0, 3),
            "whole pages"
        );
        state.pinned.insert(at.addr() as u64, bytes);
        state.calls.push(Call::Register(at.addr() as u64, bytes));
        SUCCESS
    })
}

unsafe extern "C" fn host_unregister(at: *mut c_void) -> Status {
    with("host_unregister", |state| {
        let known = state.pinned.remove(&(at.addr() as u64));
        assert!(known.is_some(), "registered before");
        state.calls.push(Call::Unregister(at.addr() as u64));
        SUCCESS
    })
}

unsafe extern "C" fn host_device_pointer(out: *mut DevicePtr, at: *mut c_void, _: u32) -> Status {
    with("host_device_pointer", |state| {
        assert!(state.is_pinned(at.addr() as u64, 1));
        unsafe { out.write(at.addr() as u64 + MAPPED) };
        SUCCESS
    })
}

fn allocate(state: &mut State, bytes: usize) -> u64 {
    let mut memory = vec![0x5555_5555_5555_5555_u64; bytes.div_ceil(8)];
    let address = memory.as_mut_ptr().expose_provenance() as u64;
    state.allocated.insert(address, memory);
    address
}

unsafe extern "C" fn host_alloc(out: *mut *mut c_void, bytes: usize, flags: u32) -> Status {
    with("host_alloc", |state| {
        assert_eq!(flags, 3, "portable and mapped");
        let address = allocate(state, bytes);
        state.pinned.insert(address, bytes);
        unsafe { out.write(address as *mut c_void) };
        SUCCESS
    })
}

unsafe extern "C" fn host_free(at: *mut c_void) -> Status {
    with("host_free", |state| {
        let address = at.addr() as u64;
        state.pinned.remove(&address).expect("pinned");
        state.allocated.remove(&address).expect("allocated");
        state.calls.push(Call::FreePinned(address));
        SUCCESS
    })
}

unsafe extern "C" fn memory_alloc(out: *mut DevicePtr, bytes: usize) -> Status {
    with("memory_alloc", |state| {
        unsafe { out.write(allocate(state, bytes)) };
        SUCCESS
    })
}

unsafe extern "C" fn memory_free(at: DevicePtr) -> Status {
    with("memory_free", |state| {
        state.allocated.remove(&at).expect("allocated");
        SUCCESS
    })
}

fn copy_one(state: &mut State, stream: Handle, target: u64, source: u64, bytes: usize) -> Status {
    let len = bytes as u64;
    let call = Call::Copy(stream, target, source, len);
    state.push(stream, call, Op::Copy(target, source, len))
}

unsafe extern "C" fn memcpy_to_device(
    target: DevicePtr,
    source: *const c_void,
    bytes: usize,
    stream: Handle,
) -> Status {
    with("memcpy_to_device", |state| {
        assert!(
            state.is_pinned(source.addr() as u64, bytes),
            "across pieces"
        );
        copy_one(state, stream, target, source.addr() as u64, bytes)
    })
}

unsafe extern "C" fn memcpy_to_host(
    target: *mut c_void,
    source: DevicePtr,
    bytes: usize,
    stream: Handle,
) -> Status {
    with("memcpy_to_host", |state| {
        assert!(
            state.is_pinned(target.addr() as u64, bytes),
            "across pieces"
        );
        copy_one(state, stream, target.addr() as u64, source, bytes)
    })
}

pub(super) unsafe extern "C" fn memcpy_batch(
    targets: *mut DevicePtr,
    sources: *mut DevicePtr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CopyAttributes,
    firsts: *mut usize,
    num_attributes: usize,
    stream: Handle,
) -> Status {
    with("memcpy_batch", |state| {
        assert_eq!((num_attributes, unsafe { firsts.read() }), (1, 0));
        let attributes = unsafe { attributes.read() };
        state.attributes.push(attributes);
        let to_device = attributes == CopyAttributes::new(true, 0)
            || state.is_pinned(unsafe { sources.read() }, 1);
        state.calls.push(Call::Batch(stream, count, to_device));
        for index in 0..count {
            let (target, source, bytes) = unsafe {
                (
                    targets.add(index).read(),
                    sources.add(index).read(),
                    sizes.add(index).read(),
                )
            };
            let host = if to_device { source } else { target };
            assert!(state.is_pinned(host, bytes), "across pieces");
            copy_one(state, stream, target, source, bytes);
        }
        SUCCESS
    })
}

unsafe extern "C" fn module_load(module: *mut Handle, code: *const c_void) -> Status {
    with("module_load", |_| {
        let code = unsafe { CStr::from_ptr(code.cast()) };
        if code != c"gather" {
            return 200;
        }
        unsafe { module.write(3) };
        SUCCESS
    })
}

unsafe extern "C" fn module_unload(_: Handle) -> Status {
    with("module_unload", |_| SUCCESS)
}

unsafe extern "C" fn module_function(
    function: *mut Handle,
    _: Handle,
    symbol: *const c_char,
) -> Status {
    with("module_function", |_| {
        if unsafe { CStr::from_ptr(symbol) } != c"copy_gather" {
            return 500;
        }
        unsafe { function.write(KERNEL) };
        SUCCESS
    })
}

unsafe extern "C" fn launch_kernel(
    function: Handle,
    blocks: u32,
    _: u32,
    _: u32,
    threads: u32,
    _: u32,
    _: u32,
    _: u32,
    stream: Handle,
    arguments: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    with("launch_kernel", |state| {
        assert_eq!(function, KERNEL);
        assert!(threads <= 1024);
        let (list, count, share) = unsafe {
            (
                arguments.read().cast::<u64>().read(),
                arguments.add(1).read().cast::<u32>().read(),
                arguments.add(2).read().cast::<u32>().read(),
            )
        };
        let call = Call::Launch(stream, blocks, count, share);
        state.push(stream, call, Op::Kernel(list, count))
    })
}

unsafe extern "C" fn launch_host_function(
    stream: Handle,
    function: HostFn,
    value: *mut c_void,
) -> Status {
    with("launch_host_function", |state| {
        let op = Op::Host(function, value.addr());
        state.push(stream, Call::HostFn(stream), op)
    })
}
