/* What the parts of the runtime share: error codes, and whether a graph is being captured. */
#pragma once
#include <stdint.h>
#include <stddef.h>

typedef int aclError;
enum { ACL_SUCCESS = 0, ACL_ERROR_RT_PARAM_INVALID = 107000, ACL_ERROR_RT_INVALID_DEVICEID = 107001, ACL_ERROR_RT_CAPTURE_DEPENDENCY = 107024,
       ACL_ERROR_RT_STREAM_UNJOINED = 107025, ACL_ERROR_RT_STREAM_CAPTURED = 107027, ACL_ERROR_RT_EVENT_CAPTURED = 107028,
       ACL_ERROR_RT_STREAM_NOT_CAPTURED = 107029, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT = 107030,
       ACL_ERROR_STREAM_TASK_GROUP_STATUS = 107033, ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED = 107036,
       ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD = 107038, ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
       ACL_ERROR_RT_MEMORY_ALLOCATION = 207001, ACL_ERROR_FAILURE = 500000 };
enum { MEMCPY_DEVICE_TO_HOST = 2 };
enum { STREAM_COMPLETE = 0, EVENT_COMPLETE = 1, WAIT_COMPLETE = 0 };

#define COUNT(counter) __atomic_fetch_add(&(counter), 1, __ATOMIC_RELAXED)

#pragma GCC visibility push(hidden) /* these names are ours alone */
extern __thread char message[1024];

/* what softnpu/graph_capture.py is told */
enum happening { BEGIN, JOIN, END, REPLAY, DESTROY, MEMCPY, MEMSET, GROUP_BEGIN, GROUP_END, UPDATE_BEGIN, UPDATE_END };
aclError tell(void *stream, enum happening what, void *to, const void *from, size_t size, int value);
int in_capture(void *stream);
int unsafe_now(void);
aclError refuse_while_capturing(const char *what);
#pragma GCC visibility pop
