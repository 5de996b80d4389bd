--[[
Gives the group up. A repeated yield is answered like the first, and so is one of a lease that lost data took along.
A rank of a gang leaves; the last one out gives the group up.
ARGV  1 floor  2 lease id  3 token, or '' where an operator yields for a job  4 that operator, or ''
      5 '1': the body did its work, so a weight sync has brought the weights (of a gang: if all ranks did); else '0'
      6 rank, or '' if it is no gang's, or for all ranks
Reply ok pending_waiters kept counter   (kept 1: nobody waits, so the state stays on the device)
      not_holder holder_job holder_token counter taken_by why
Events LeaseYielded, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local lease, token, rank = ARGV[2], ARGV[3], ARGV[6]
local this_rank = lease .. '/' .. rank

begin(true, FIELD_MAX)
local number = token == '' and 0 or check_number('token', tonumber(token))
-- As for a renewal: less than our token means that the server forgot our grant. Then the lease stood until now.
local forgotten = S.token < number and S.swap_id < number and S.fence <= number and not has_ended(lease)
local mine = S.lease_id == lease and (token == '' or S.token == number)
if not mine and not forgotten then
  local by, why = taken_by(lease)
  if has_ended(this_rank) or (has_ended(lease) and by == '' and why == '') then
    local pending = redis.call('ZCARD', queue_key)
    return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
  end
  return { 'not_holder', S.job, S.token, S.counter, by, why }
end
if forgotten then
  floor = math.max(floor, number) -- it proves the loss, too
end
settle_clock()
local ended = mine and rank ~= '' and hear_end(lease, rank) -- while it worked
if ended then
  advance()
  save()
  return { 'not_holder', S.job, S.token, S.counter, '', ended }
end
if mine and S.gang ~= '' and rank ~= '' and ARGV[5] ~= '1' and S.label == 'weight_sync' then
  redis.call('HSET', waiters_key, lease .. '/failed', '1')
end
if mine and S.gang ~= '' and rank ~= '' and not party_leave(lease, rank, true) then
  save()
  local pending = redis.call('ZCARD', queue_key)
  return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
end
if mine then
  if ARGV[5] == '1' and S.label == 'weight_sync' and redis.call('HEXISTS', waiters_key, lease .. '/failed') == 0 then
    redis.call('HDEL', jobs_key, S.job .. '/needs_weights')
  end
  end_lease('LeaseYielded', 'by', ARGV[4])
elseif S.lease_id == '' then
  set('token', number) -- so that nobody puts an older lease back
end
remember_ended(lease)
if rank ~= '' and forgotten then
  remember_ended(this_rank)
  gang_tell(lease, 'rank ' .. rank .. ' gave it up after the server had lost data') -- who is inside, nobody can say
end
local pending = redis.call('ZCARD', queue_key)
if pending > 0 then
  reap()
  advance()
end
save()
return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
